"""A forward of our own for GLM MoE models on a GPU: paged attention, CUDA graphs, sampling on the device."""

MODEL_TYPES = ("glm4_moe",)
