"""The errors that an exchange can end with. Knows nothing of tensors."""

from __future__ import annotations


class ExchangeError(BufferError):
    """Memory cannot be exchanged as asked.

    Attributes:
        reason: what stands in the way, with the offending value and the rule.
        remedy: what to do instead, or None.

    A subclass of :class:`BufferError`, which the array API prescribes for ``__dlpack__``.
    """

    reason: str
    remedy: str | None

    def __init__(self, reason: str = "", remedy: str | None = None) -> None:
        """Keep reason and remedy; the text of the error is both."""
        super().__init__(f"{reason}; {remedy}" if remedy else reason)
        self.reason = reason
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[ExchangeError], tuple[str, str | None]]:
        """Pickle by the two parts, so that an error survives a process boundary."""
        return type(self), (self.reason, self.remedy)


class LeaseError(ExchangeError):
    """Somebody holds a lease that forbids this access."""


class DeviceLostError(RuntimeError):
    """The driver says that the device is gone; nothing on it can be waited for."""
