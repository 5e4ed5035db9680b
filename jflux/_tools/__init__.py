"""What jflux's commands share."""
