"""Collection on arrays. Without this folder everything still works, as slowly as TorchRL."""
