"""HTML pages for people: an evaluation (`evaluation`), the content of a checkpoint (`inspection`),
a quantization (`quantization`).

A page is one file without scripts, style sheets or pictures of elsewhere. Its first sentence is the
verdict; every plot has a line that says what it shows, and names on both axes.
"""
