"""What every section of a configuration has in common. Knows no field."""

from pydantic import BaseModel, ConfigDict

MAX_SEED = 2**64 - 1


class Section(BaseModel):
    """A group of fields: frozen, strict about types, and closed to names it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, protected_namespaces=())
