"""On PYTHONPATH this folder has every Python play a machine with a GPU: see ../stand_in_gpu.py."""

import stand_in_gpu

stand_in_gpu.install()
