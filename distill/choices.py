"""Values of the distillation scripts' flags. Imports nothing: flags are parsed before torch is imported."""
TOO_LONG = ("stop", "drop", "cut_left", "cut_right")            # what becomes of samples above the limit of tokens
CHECKS = ("unreadable", "invalid", "template", "teacher", "too_long")    # of samples, for --drop_bad
THINKING = {"template": None, "true": True, "false": False}     # --enable_thinking -> chat.Encoder's thinking
GROUP = 15      # lines of one sentence in the language task: a sentence in so many languages
