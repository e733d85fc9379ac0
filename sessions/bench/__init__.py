"""What `chatkv bench` measures. Returns rows; prints nothing."""
