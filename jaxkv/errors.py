"""What can go wrong for a reason outside this code, said in one line for a person. Knows nothing of how it is shown."""


class JaxkvError(Exception):
    """Something a user or a machine can cause; the message says what happened, got versus allowed, and what to change."""

    exit_code = 2


class ConfigError(JaxkvError):
    """The configuration, a path or a combination of settings cannot work."""


class RequestError(JaxkvError):
    """One request cannot be served as it is written; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
