"""Every error that this library raises on purpose.

    OnebitError
    |-- ConfigError      (also a ValueError)   a value, recipe key, text or file that cannot be used
    |-- LayoutError      (also a ValueError)   a buffer or parameter that does not fit the flat layout
    |-- MismatchError    (also a RuntimeError) workers disagree on something that must be equal
    `-- CommError        (also a RuntimeError) another worker failed, left, or never came

A message has four parts: what is wrong, the value, what is allowed, what to do.
"""


class OnebitError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(OnebitError, ValueError):
    """A setting, recipe key, text or file cannot be used as given."""


class LayoutError(OnebitError, ValueError):
    """A tensor does not fit the flat layout it is used with."""


class MismatchError(OnebitError, RuntimeError):
    """Workers disagree on something that must be the same on all of them."""


class CommError(OnebitError, RuntimeError):
    """Another worker failed, left, or did not come in time."""
