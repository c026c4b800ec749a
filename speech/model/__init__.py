"""What Higgs-Audio models are: layouts of V2 and TTS 3, labels, weights, export."""
