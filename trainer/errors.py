"""The one kind of error that is the user's to mend, and how a program says it."""

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # Ctrl-C, where there is nothing to go on with: what shells say of it
EXIT_STOPPED = 75  # a signal, after a clean checkpoint: start me again

# Names the file where a machine's first rank leaves its exit code for the launcher: torchrun, when a signal stops it,
# does not tell the codes of its workers.
STATUS_FILE_VARIABLE = "MESHLOOM_STATUS_FILE"
LAUNCHER_VARIABLE = "MESHLOOM_LAUNCHER"  # its process id


class StoppedRun(RuntimeError):
    """The run itself decided to stop, on every rank alike: a result to report, not a bug. No traceback."""


class UserError(ValueError):
    """Something in the config, the command line or the files that only the user can put right.

    ``problems`` holds one line each: what is wrong, the value, what would work. Shown without a traceback.
    """

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems))

    def message(self) -> str:
        lines = [f"error: {problem}" for problem in self.problems]
        return "\n".join(lines)
