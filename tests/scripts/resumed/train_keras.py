import keras
import numpy
import torch
from spotheal.training.integrations.keras import ExactSampler, SpotCheckpoints, exact_loader

keras.utils.set_random_seed(7)
x = numpy.random.randn(44, 5).astype("float32")
y = x.sum(1, keepdims=True)
layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((5,)), *layers])
model.compile("adam", "mse")
dataset = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
loader = exact_loader(dataset, ExactSampler(len(x)), batch_size=8)
model.fit(loader, epochs=3, verbose=0, callbacks=[SpotCheckpoints(loader)])
model.save_weights("model.weights.h5")
