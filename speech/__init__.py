"""Speech: Higgs-Audio conversations, codes, model, export, evaluation."""
