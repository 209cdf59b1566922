"""Models with recurrent layers: Gated DeltaNet, KDA, Mamba-2 and short convolutions, with or without attention."""
