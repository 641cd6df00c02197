"""What SECURITY.md promises of outputs, of files that change and of damaged ones.

The library runs unmodified in a child process (`sandbox.py`) which the parent traces (`tracer.py`):
a system call fails, is cut, ends the process, or waits while something else happens. `cases.py`
draws such cases, limits of the process and lost standard streams, and judges what they leave.
`readers.py` draws checkpoints of seven layouts and GGUF, whole or with one fact that contradicts
another, whose values it knows.

    make fuzz-second SECONDS=600

It shares nothing with `support/fuzz` and `support/faults.py`. Linux on x86-64.
"""
