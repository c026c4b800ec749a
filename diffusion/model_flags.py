"""Flags of the scripts that take a trained model: sampling, export, lm-eval."""
import argparse

from common.flags import switch
from diffusion.choices import ORDERS


def checkpoint_flags(parser):
    """Flags of the scripts that take a trained model."""
    parser.add_argument("--checkpoint", required=True, help="checkpoint folder, or the trainer's OUTPUT_DIR")
    parser.add_argument("--pick", choices=("best", "newest"), default="best",
                        help="of an OUTPUT_DIR: the best checkpoint by --best_by, or the newest one")
    parser.add_argument("--ema", action=argparse.BooleanOptionalAction, default=True, help="take the averaged weights")


def answer_flags(parser, order):
    """Flags of the scripts that let a model answer. order: the default of --order."""
    parser.add_argument("--batch_size", type=int, default=64, help="problems answered side by side")
    parser.add_argument("--order", choices=ORDERS, default=order,
                        help="which masked tokens a pass fills: one at random, the surest ones, or all that are sure "
                             "enough")
    parser.add_argument("--threshold", type=float, default=0.9,
                        help="confidence: probability a token must have, 0 to 1")
    parser.add_argument("--draws", type=int, default=16, help="draws of the noise for the bound of a likelihood")
    switch(parser, "--bf16", help="bfloat16 compute")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
