"""The memory that reading one file may take, and the reasons for which a file is refused."""

AGAIN = "Copy or write the file again."
_RAISE = "Raise the limit (memory_limit=, --memory-limit), or write several files."


class Refused(Exception):
    """The reason to refuse a file, as a clause without the file's name, and what to do about it."""

    def __init__(self, reason: str, advice: str = AGAIN) -> None:
        super().__init__(reason)
        self.reason = reason
        self.advice = advice


class Unsafe(Refused):
    """The file names code, or forges the state of what would be built."""


class Malformed(Refused):
    """The file is damaged, or declares what it does not hold."""


class TooLarge(Refused):
    """The file declares more than reading it may take of memory."""

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason, advice or _RAISE)


class Undescribed(Refused):
    """A value that is harmless and is of no kind that is read, such as a sparse tensor."""

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason, advice or "Leave it out, or write it as another kind.")


class Budget:
    """Bytes that may still be taken; taken before they are allocated, and never given back.

    limit_bytes: how many there are in all.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes: int = limit_bytes
        self.left_bytes: int = limit_bytes

    def take(self, size_bytes: int) -> None:
        """Raises TooLarge where fewer bytes are left."""
        if size_bytes > self.left_bytes:
            raise TooLarge(f"it takes more than {self.limit_bytes} bytes of memory")
        self.left_bytes -= size_bytes
