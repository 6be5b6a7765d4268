//! Runs PTX on a CPU, thread by thread, and watches what it does: for tests of GPU kernels on machines without a GPU.
