"""A callback for each of Lightning, Hugging Face's Trainer, Keras 3 and Accelerate: save at the notice, resume exactly.

Each needs its library and imports nothing of the others'; state goes through our store, never through torch.save.
"""
