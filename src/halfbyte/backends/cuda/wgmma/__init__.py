"""The Hopper kernel for many tokens: weights as the register operand of `wgmma`."""
