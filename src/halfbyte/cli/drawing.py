"""The options by which `generate` and `chat` draw a token from its probabilities
(`generation.Sampling`), and the chat template of `chat` and `serve`.
"""

from __future__ import annotations

from typing import Annotated

import typer

Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token; above 0 draws one.")]
TopK = Annotated[int, typer.Option(help="Draw among this many of the likeliest tokens; 0 for all.")]
TopP = Annotated[float, typer.Option(help="Draw among the fewest tokens whose probabilities reach this.")]
Seed = Annotated[int, typer.Option(help="Seed of the draws.")]
MinP = Annotated[float, typer.Option("--min-p", help="Least probability, relative to the likeliest token's.")]
RepeatPenalty = Annotated[float, typer.Option("--repeat-penalty", help="Above 1 makes the last 64 tokens less likely.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends the answer; may be given several times.")]
ChatTemplate = Annotated[
    str | None, typer.Option("--chat-template", help="chatml, or a file with a Jinja template; the model's own by default.")
]
