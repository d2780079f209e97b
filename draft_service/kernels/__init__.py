"""The kernels of the draft service: what each promises, its plain form, and its Triton form."""
