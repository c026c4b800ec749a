"""Imports of a run of train_v2_ddp.py, done once before ranks are forked."""
import data  # noqa: F401
from core import adapters, checkpoint, dist, kernels, metrics, optim, packing, run  # noqa: F401
from speech import v2, weights  # noqa: F401
