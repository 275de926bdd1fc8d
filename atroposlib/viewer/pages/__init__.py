"""The pages of the viewer: values in, HTML out; every text passes through `markup`."""
