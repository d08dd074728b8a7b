"""The bit work, behind one contract (see `reference`). The back-end is chosen by device and said once in the log."""

from onebit.kernels.reference import pack_bits, pack_signs, spread, unpack_bits, unpack_signs

__all__ = ["pack_bits", "pack_signs", "spread", "unpack_bits", "unpack_signs"]
