"""The environments that are trained, each made small, and how one is trained and measured."""
