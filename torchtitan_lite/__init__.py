"""FP8 pretraining for Llama 3, small enough to read: see README.md for the map."""
