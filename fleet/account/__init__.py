"""What an AWS account needs for a first job: images, instance types, quotas, network, roles; read, chosen, made."""
