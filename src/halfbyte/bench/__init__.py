"""Benchmarks as commands: time, bytes a second, fraction of the measured limit, ratio to peers of
the same run.
"""
