"""The target model: transformers' definitions with our attention function, recurrent mixers and fused layers."""
