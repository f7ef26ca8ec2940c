"""TRT-LLM MoE kernels through FlashInfer (SM100/SM103): layouts, calls and layers."""
