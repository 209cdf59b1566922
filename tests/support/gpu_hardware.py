"""Helpers of tests/options/test_roofline.py and its neighbours."""

from types import SimpleNamespace

H100 = SimpleNamespace(
    multi_processor_count=132, major=9, minor=0,
    clock_rate=1_830_000, memory_clock_rate=2_619_000, memory_bus_width=5120,
)  # fmt: skip
