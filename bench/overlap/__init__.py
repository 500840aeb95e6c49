"""What it gains to plan the next step while the device works."""
