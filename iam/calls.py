"""Every call to AWS that this project makes, and who makes it: the one table the policies are made from.

tests/iam/test_iam.py reads the code for its calls and holds this table equal to them, both ways; and the calls that
reach AWS while the whole suite of tests runs are recorded and held against it too (tests/harness/aws_calls.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Who(str, Enum):
    INSTANCE = "instance"  # the agent and the bootstrap, with the role of the instance profile
    OPERATOR = "operator"  # fleetctl, with the operator's own credentials
    ADMINISTRATOR = "administrator"  # fleetctl where it makes roles: who may do that may do everything


class On(Enum):
    """What a call works on, and so which condition the policy puts on it."""

    ANYTHING = "a read that takes no condition but the region"
    ACCOUNT = "resources of this account and region, whoever's"
    LAUNCH = "a launch, which takes part of the account's and of others' resources: images, subnets, templates"
    PUBLIC = "parameters that AWS publishes for everybody: its images"
    SSH = "instances that carry the run's tag, by the condition key that EC2 Instance Connect knows"
    RUN = "existing resources that carry the run's tag"
    NEW = "a new resource, which must be tagged as the run's in the same call"
    SUPERSEDED = "resources of the run that a verified successor has replaced"
    TAGS = "tags: while creating, else a closed list of keys on resources of the run"
    TOPIC = "the SNS topic that is told of the run"
    FLEET_SIZE = "how many instances the fleet of a sweep keeps"
    SCHEDULE = "the schedule of the run's on-demand rescue"
    SECRETS = "secrets below the job's path, and those that are named"
    TRAINER = "the role of a caged trainer"
    OBJECTS = "objects below the store's prefix"
    LISTING = "the list of what is below the store's prefix"
    BUCKET = "the store's bucket itself"
    RESULTS = "objects at the place of results, where that is another bucket"
    NEW_FILE_SYSTEM = "a new file system, which must be tagged as one for results in the same call"
    FILE_SYSTEM = "file systems that are tagged as made for results"
    FILE_SYSTEMS = "any file system of the account, to look at: one that somebody else made can be used, too"
    BATCH_LOOK = "AWS Batch, its logs and ECR's token: reads that take no resource"
    BATCH = "environments, queues and job definitions of AWS Batch whose names begin with spotheal, and jobs"
    BATCH_LOGS = "log groups of containers"
    IMAGES = "the repository of the containers' image"
    ROLES = "the roles of instances and fleet, and the instance profile"
    AWS_ROLES = "roles that AWS makes for its own services, once an account"


@dataclass(frozen=True)
class Call:
    """`action` as IAM names it; `operations` as the API does, where the two differ."""

    action: str
    on: On
    who: frozenset[Who]
    resources: tuple[str, ...] = ()  # kinds of EC2 resources, as in their ARNs
    operations: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """`service:Operation` of each API operation that needs this action."""
        service, _, name = self.action.partition(":")
        return tuple(f"{service}:{operation}" for operation in self.operations or (name,))


_I = frozenset({Who.INSTANCE})
_O = frozenset({Who.OPERATOR})
_BOTH = _I | _O
_A = frozenset({Who.ADMINISTRATOR})
_PUT = ("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload")

CALLS: tuple[Call, ...] = (
    Call("ec2:DescribeVolumes", On.ANYTHING, _BOTH),
    Call("ec2:DescribeSnapshots", On.ANYTHING, _BOTH),
    Call("kms:DescribeKey", On.ANYTHING, _O),
    Call("ec2:DescribeInstances", On.ANYTHING, _BOTH),
    Call("ec2:DescribeSpotPriceHistory", On.ANYTHING, _BOTH),
    Call("ec2:AttachVolume", On.RUN, _I, ("volume", "instance")),
    Call("ec2:DetachVolume", On.RUN, _I, ("volume", "instance")),
    Call("ec2:TerminateInstances", On.RUN, _BOTH, ("instance",)),
    Call("ec2:CancelSpotFleetRequests", On.RUN, _BOTH, ("spot-fleet-request",)),
    Call("ec2:DeleteFleets", On.RUN, _BOTH, ("fleet",)),
    Call("ec2:ModifySpotFleetRequest", On.RUN, _O, ("spot-fleet-request",)),
    Call("ec2:ModifyFleet", On.RUN, _O, ("fleet",)),
    Call("ec2:ModifySpotFleetRequest", On.FLEET_SIZE, _I),
    Call("ec2:ModifyFleet", On.FLEET_SIZE, _I),
    Call("ec2:CreateVolume", On.NEW, _BOTH, ("volume", "snapshot")),
    Call("ec2:CreateSnapshot", On.NEW, _I, ("snapshot", "volume")),
    Call("ec2:CreateTags", On.TAGS, _BOTH, ("volume", "snapshot", "instance")),
    Call("ec2:DeleteVolume", On.SUPERSEDED, _I, ("volume",)),
    Call("ec2:DeleteSnapshot", On.SUPERSEDED, _I, ("snapshot",)),
    Call("sns:Publish", On.TOPIC, _I),
    Call("scheduler:GetSchedule", On.SCHEDULE, _I),
    Call("scheduler:UpdateSchedule", On.SCHEDULE, _BOTH),
    Call("scheduler:DeleteSchedule", On.SCHEDULE, _I),
    Call("scheduler:CreateSchedule", On.SCHEDULE, _O),
    Call("s3:GetObject", On.OBJECTS, _BOTH, operations=("GetObject", "HeadObject")),
    Call("s3:PutObject", On.OBJECTS, _BOTH, operations=_PUT),
    Call("s3:AbortMultipartUpload", On.OBJECTS, _BOTH),
    Call("s3:DeleteObject", On.OBJECTS, _BOTH),
    Call("s3:ListBucket", On.LISTING, _I, operations=("ListObjectsV2",)),
    Call("s3:ListBucket", On.LISTING, _O, operations=("ListObjectsV2", "HeadBucket")),
    Call("s3:PutObject", On.RESULTS, _I, operations=_PUT),
    Call("s3:AbortMultipartUpload", On.RESULTS, _I),
    Call("elasticfilesystem:DescribeMountTargets", On.FILE_SYSTEMS, _BOTH),
    Call("elasticfilesystem:DescribeMountTargetSecurityGroups", On.FILE_SYSTEMS, _O),
    Call("elasticfilesystem:DescribeFileSystems", On.FILE_SYSTEMS, _O),
    Call("elasticfilesystem:CreateFileSystem", On.NEW_FILE_SYSTEM, _O),
    Call("elasticfilesystem:CreateMountTarget", On.FILE_SYSTEM, _O),
    Call("elasticfilesystem:DeleteMountTarget", On.FILE_SYSTEM, _O),
    Call("elasticfilesystem:DeleteFileSystem", On.FILE_SYSTEM, _O),
    Call("ssm:GetParameters", On.SECRETS, _I),
    Call("secretsmanager:GetSecretValue", On.SECRETS, _I),
    Call("sts:AssumeRole", On.TRAINER, _I),
    Call("ssm:PutParameter", On.SECRETS, _O),
    Call("ssm:DeleteParameter", On.SECRETS, _O),
    Call("ssm:GetParametersByPath", On.SECRETS, _O),
    Call("secretsmanager:CreateSecret", On.SECRETS, _O),
    Call("secretsmanager:PutSecretValue", On.SECRETS, _O),
    Call("secretsmanager:DeleteSecret", On.SECRETS, _O),
    Call("secretsmanager:ListSecrets", On.ANYTHING, _O),
    Call("sts:GetCallerIdentity", On.ANYTHING, _O),
    Call("pricing:GetProducts", On.ANYTHING, _O),
    Call("ec2:DescribeAvailabilityZones", On.ANYTHING, _O),
    Call("ec2:DescribeLaunchTemplateVersions", On.ANYTHING, _O),
    Call("ec2:DescribeSpotFleetRequests", On.ANYTHING, _O),
    Call("ec2:DescribeSpotFleetRequestHistory", On.ACCOUNT, _O, ("spot-fleet-request",)),
    Call("ec2:DescribeFleets", On.ANYTHING, _O),
    Call("ec2:DescribeFleetHistory", On.ACCOUNT, _O, ("fleet",)),
    Call("ec2:DescribeSubnets", On.ANYTHING, _O),
    Call("ec2:CreateLaunchTemplate", On.ACCOUNT, _O, ("launch-template",)),
    Call("ec2:DescribeLaunchTemplates", On.ANYTHING, _O),
    Call("ec2:DeleteLaunchTemplate", On.ACCOUNT, _O, ("launch-template",)),
    Call("ec2:DeleteSnapshot", On.RUN, _O, ("snapshot",)),
    Call("ec2:DeleteSecurityGroup", On.ACCOUNT, _O, ("security-group",)),
    Call("ec2:RequestSpotFleet", On.LAUNCH, _O),
    Call("ec2:CreateFleet", On.LAUNCH, _O),
    Call("ec2:RunInstances", On.LAUNCH, _O, operations=("RunInstances", "RequestSpotFleet", "CreateFleet")),
    Call("ec2:DeleteVolume", On.ACCOUNT, _O, ("volume",)),
    Call("ec2:AttachVolume", On.ACCOUNT, _O, ("volume", "instance")),  # the instance that fills it is no run's
    Call("ec2-instance-connect:SendSSHPublicKey", On.SSH, _O, ("instance",)),
    Call("ec2:DescribeImages", On.ANYTHING, _O),
    Call("ec2:GetConsoleOutput", On.ACCOUNT, _O, ("instance",)),
    Call("ec2:DescribeInstanceTypes", On.ANYTHING, _O),
    Call("ec2:DescribeInstanceTypeOfferings", On.ANYTHING, _O),
    Call("ec2:DescribeVpcs", On.ANYTHING, _O),
    Call("ec2:DescribeSecurityGroups", On.ANYTHING, _O),
    Call("ec2:DescribeKeyPairs", On.ANYTHING, _O),
    Call("ec2:CreateSecurityGroup", On.ACCOUNT, _O, ("security-group", "vpc")),
    Call("ec2:AuthorizeSecurityGroupIngress", On.ACCOUNT, _O, ("security-group",)),
    Call("ec2:ImportKeyPair", On.ACCOUNT, _O, ("key-pair",)),
    Call("ssm:GetParameter", On.PUBLIC, _O),
    Call("ssm:GetParametersByPath", On.PUBLIC, _O),
    Call("servicequotas:GetServiceQuota", On.ANYTHING, _O),
    Call("iam:GetRole", On.ROLES, _O | _A),
    Call("iam:GetRolePolicy", On.ROLES, _O | _A),
    Call("iam:GetInstanceProfile", On.ROLES, _O | _A),
    Call("iam:ListRolePolicies", On.ROLES, _O | _A),
    Call("iam:ListAttachedRolePolicies", On.ROLES, _O | _A),
    Call("iam:CreateRole", On.ROLES, _A),
    Call("iam:UpdateAssumeRolePolicy", On.ROLES, _A),
    Call("iam:PutRolePolicy", On.ROLES, _A),
    Call("iam:AttachRolePolicy", On.ROLES, _A),
    Call("iam:CreateInstanceProfile", On.ROLES, _A),
    Call("iam:AddRoleToInstanceProfile", On.ROLES, _A),
    Call("iam:RemoveRoleFromInstanceProfile", On.ROLES, _A),
    Call("iam:DeleteInstanceProfile", On.ROLES, _A),
    Call("iam:DeleteRolePolicy", On.ROLES, _A),
    Call("iam:DetachRolePolicy", On.ROLES, _A),
    Call("iam:DeleteRole", On.ROLES, _A),
    Call("iam:CreateServiceLinkedRole", On.AWS_ROLES, _O),
    Call("s3:CreateBucket", On.BUCKET, _O),
    Call("s3:GetBucketPublicAccessBlock", On.BUCKET, _O, operations=("GetPublicAccessBlock",)),
    Call("s3:PutBucketPublicAccessBlock", On.BUCKET, _O, operations=("PutPublicAccessBlock",)),
    Call("s3:PutEncryptionConfiguration", On.BUCKET, _O, operations=("PutBucketEncryption",)),
)

CALLS += tuple(
    Call(f"batch:{name}", On.BATCH_LOOK, _O)
    for name in ("DescribeComputeEnvironments", "DescribeJobQueues", "DescribeJobDefinitions", "DescribeJobs",
                 "ListJobs")
)  # fmt: skip
CALLS += tuple(
    Call(f"batch:{name}", On.BATCH, _O)
    for name in ("CreateComputeEnvironment", "UpdateComputeEnvironment", "DeleteComputeEnvironment", "CreateJobQueue",
                 "UpdateJobQueue", "DeleteJobQueue", "RegisterJobDefinition", "DeregisterJobDefinition", "SubmitJob",
                 "TerminateJob")
)  # fmt: skip
CALLS += (
    Call("logs:DescribeLogGroups", On.BATCH_LOOK, _O),
    Call("logs:CreateLogGroup", On.BATCH_LOGS, _O),
    Call("logs:PutRetentionPolicy", On.BATCH_LOGS, _O),
    Call("logs:DeleteLogGroup", On.BATCH_LOGS, _O),
    Call("logs:GetLogEvents", On.BATCH_LOGS, _O),
    Call("ecr:GetAuthorizationToken", On.BATCH_LOOK, _O),
    Call("ecr:DescribeImages", On.IMAGES, _O),
    Call("ecr:CreateRepository", On.IMAGES, _O),
)

# What the documents allow beside the table, with the reason why no call of that name exists.
NOT_CALLS: dict[str, str] = {
    "elasticfilesystem:TagResource": "asked where a file system is made with its tags",
    "ec2:CreateNetworkInterface": "asked where a mount target is made, which is one",
    "ec2:DescribeNetworkInterfaces": "the same",
    "ec2:DeleteNetworkInterface": "asked where a mount target is deleted",
    "batch:TagResource": "asked where something of Batch is made with its tags",
    "logs:TagResource": "asked where a log group is made with its tags",
    "ecr:BatchCheckLayerAvailability": "Docker's, where it pushes an image",
    "ecr:BatchGetImage": "the same: Docker with containerd's store reads the manifest that is there",
    "ecr:InitiateLayerUpload": "the same",
    "ecr:UploadLayerPart": "the same",
    "ecr:CompleteLayerUpload": "the same",
    "ecr:PutImage": "the same",
    "kms:CreateGrant": "asked by EC2 in the caller's name, where a volume of a customer key is attached",
    "kms:Decrypt": "the same, where one is made",
    "kms:DescribeKey": "the same",
    "kms:GenerateDataKeyWithoutPlaintext": "the same",
    "kms:ReEncryptFrom": "the same, where one is made of a snapshot that has another key",
    "kms:ReEncryptTo": "the same",
    "iam:PassRole": "asked where a fleet, an instance or a schedule is made that is to have a role",
}
