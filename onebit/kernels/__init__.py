"""The bit work, behind one contract (see `reference`). The back-end is chosen by device and said once in the log."""

from onebit.kernels.reference import pack_signs, unpack_signs

__all__ = ["pack_signs", "unpack_signs"]
