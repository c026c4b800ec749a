"""lora.export with the argument order of `lora.py merge`."""


def merge(model_path, adapter, output_dir, dtype="float32", shard_bytes=5 * 10**9, layout="native", codec=None,
          base_dtype=None):
    from lora import export
    return export(model_path, output_dir, layout, dtype, shard_bytes, adapter, codec, base_dtype)
