"""Commands under disturbance: what SECURITY.md promises of outputs, and of files that change.

The library runs unmodified in a child process (`sandbox.py`) which the parent traces (`tracer.py`):
a system call fails, is cut, ends the process, or waits while something else happens. `cases.py`
draws such cases, limits of the process and lost standard streams, and judges what they leave.

    make fuzz-second SECONDS=600

It shares nothing with `support/fuzz` and `support/faults.py`. Linux on x86-64.
"""
