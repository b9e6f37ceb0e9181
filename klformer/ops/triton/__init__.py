"""GPU kernels in Triton, for what torch's fused attention does not cover: `backend="triton"`.

Nobody here has a GPU. Every line of the kernels is run by tests in Triton's interpreter, their machine code is built
for real devices, and `auto` takes them on a device only after they were right there. Triton is the extra `triton`;
nothing here imports it before the backend is used.

    backend.py    which calls it serves
    launches.py   what kernels are launched on: tensors of a call, sizes of blocks, results
    prf.py        the kernels for positive features, with their equations
"""
