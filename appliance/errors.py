"""The error tree: class = exit code + what happened + why + what to do next.

    ApplianceError                 70  a defect of ours (never raised on purpose)
    ├── UsageError                  2  the command line is wrong
    ├── ModelError                 65  the model cannot be used (format, missing or broken files)
    ├── NotReachable               69  the service is not running, or does not answer
    ├── StoreError                 73  disk full, read-only or damaged store
    ├── TransientError             75  a later try may succeed (port taken, worker died while loading)
    ├── DoesNotFit                 76  the memory ceiling is too low for this model
    ├── CpuNotSupported            77  this CPU, kernel or userland cannot run the worker
    └── ConfigError                78  the configuration file, environment or a drop-in is wrong

Rules: one error is one line; foreign errors are mapped to this tree at the edge where they arise; only
`appliance.cli` turns a class into an exit code. The unit restarts on none of 65, 76, 77 and 78.
"""

from __future__ import annotations

from typing import ClassVar


class ApplianceError(Exception):
    """An error an operator can read: `what` happened, `why`, and what to `do` about it."""

    exit_code: ClassVar[int] = 70

    def __init__(self, what: str, *, why: str = "", do: str = "") -> None:
        self.what = what
        self.why = why
        self.do = do
        super().__init__(self.line)

    @property
    def line(self) -> str:
        """The whole error as one line of printable characters (a worker's words may hold escape sequences), not longer
        than anybody reads (a name in a hostile file may have megabytes)."""
        text = self.what
        if self.why:
            text += f": {self.why}"
        if self.do:
            text += f"; {self.do}"
        line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return line if len(line) <= 1500 else f"{line[:1000]} ... {line[-400:]}"


class UsageError(ApplianceError):
    exit_code = 2


class ModelError(ApplianceError):
    exit_code = 65


class NotReachable(ApplianceError):
    exit_code = 69


class StoreError(ApplianceError):
    exit_code = 73


class TransientError(ApplianceError):
    exit_code = 75


class DoesNotFit(ApplianceError):
    exit_code = 76


class CpuNotSupported(ApplianceError):
    exit_code = 77


class ConfigError(ApplianceError):
    exit_code = 78


def by_exit_code(code: int) -> type[ApplianceError]:
    """The class that stands for an exit code of a child process; `ApplianceError` where none does."""
    for cls in ApplianceError.__subclasses__():
        if cls.exit_code == code:
            return cls
    return ApplianceError
