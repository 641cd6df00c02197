"""ONNX models as checkpoints: initializers that quantized nodes read are packed weights."""
