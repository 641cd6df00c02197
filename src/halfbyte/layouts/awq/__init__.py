"""The layouts of AutoAWQ: gemm, gemv, gemv_fast and marlin."""
