"""The speedrun: seconds to 80 % held-out accuracy on the demo's task, on two CPU cores."""
