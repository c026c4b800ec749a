"""Block diffusion: problems, noise, transformer, sampling."""
