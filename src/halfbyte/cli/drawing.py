"""The options by which `generate` and `chat` draw a token from its probabilities (`generation.Sampling`)."""

from __future__ import annotations

from typing import Annotated

import typer

Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token; above 0 draws one.")]
TopK = Annotated[int, typer.Option(help="Draw among the so many likeliest tokens; 0 is all.")]
TopP = Annotated[float, typer.Option(help="Draw among the fewest tokens whose probabilities reach this.")]
Seed = Annotated[int, typer.Option(help="Seed of the draws.")]
