// Numbers as people read them, and colours. Knows nothing of where they come from.

export const NUM_COLOURS = 8;

export const seconds = (s) => (s < 60 ? `${s.toFixed(1)} s` : `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`);

export const count = (n) => n.toLocaleString("en");

export const times = (n) => (n === 1 ? "once" : n === 2 ? "twice" : `${n} times`);

export function bytes(n) {
  if (!n) return "0";
  const power = Math.min(4, Math.floor(Math.log2(n) / 10));
  return `${(n / 1024 ** power).toFixed(power && n / 1024 ** power < 100 ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/** A colour of the page's theme by the name of its variable. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export const owner = (place) => `c${place % NUM_COLOURS}`;

/** A canvas as large as it is shown, cleared; its context, width and height in CSS pixels. */
export function paper(canvas) {
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

/** Slanted lines over a rectangle: what is away, and not computing. */
export function hatch(pen, x, y, width, height, ink) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.strokeStyle = ink;
  pen.lineWidth = 2;
  pen.beginPath();
  for (let at = x - height; at < x + width; at += 6) {
    pen.moveTo(at, y + height);
    pen.lineTo(at + height, y);
  }
  pen.stroke();
  pen.restore();
}
