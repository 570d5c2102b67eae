"""The maths of training, as pure functions of tensors: batch, schedule, packing, advantages, losses, corrections."""
