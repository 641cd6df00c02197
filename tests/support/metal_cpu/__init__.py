"""Metal Shading Language on the CPU: shaders compiled unmodified by clang, threads run as fibres,
every access checked.
"""
