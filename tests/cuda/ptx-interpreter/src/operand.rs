//! Operands of instructions: addresses, predicates, element types, and initial register values.

/// State space of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Param,
}

/// Source predicate, and whether it is negated.
pub(crate) type Guard = (u32, bool);

/// Register with an offset in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addr {
    pub space: Space,
    pub base: u32,
    pub offset: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ElementType {
    E4m3,
    E5m2,
    F16,
    Bf16,
    F32,
    /// f32; products read its upper 19 bits.
    Tf32,
}

impl ElementType {
    pub(crate) fn of(name: &str) -> Option<Self> {
        Some(match name {
            "e4m3" => Self::E4m3,
            "e5m2" => Self::E5m2,
            "f16" => Self::F16,
            "bf16" => Self::Bf16,
            "f32" => Self::F32,
            "tf32" => Self::Tf32,
            _ => return None,
        })
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::E4m3 | Self::E5m2 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::Tf32 => 4,
        }
    }
}

/// Initial value of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Special {
    Constant(u64),
    Tid(usize),
    Ntid(usize),
    Ctaid(usize),
    Nctaid(usize),
    Lane,
    Warp,
    Warps,
    LaneMask(char),
    ClusterId(usize),
    Clusters(usize),
    ClusterCtaid(usize),
    ClusterNctaid(usize),
    ClusterRank,
    ClusterSize,
    IsCluster,
    DynamicShared,
    NumSms,
    Zero,
}

impl Special {
    pub(crate) fn of(name: &str) -> Option<Self> {
        let (name, axis) = name.split_once('.').map_or((name, 0), |(name, axis)| match axis {
            "y" => (name, 1),
            "z" => (name, 2),
            _ => (name, 0),
        });
        Some(match name {
            "%tid" => Self::Tid(axis),
            "%ntid" => Self::Ntid(axis),
            "%ctaid" => Self::Ctaid(axis),
            "%nctaid" => Self::Nctaid(axis),
            "%laneid" => Self::Lane,
            "%warpid" => Self::Warp,
            "%nwarpid" => Self::Warps,
            "%lanemask_eq" => Self::LaneMask('='),
            "%lanemask_lt" => Self::LaneMask('<'),
            "%lanemask_le" => Self::LaneMask('['),
            "%lanemask_gt" => Self::LaneMask('>'),
            "%lanemask_ge" => Self::LaneMask(']'),
            "%clusterid" => Self::ClusterId(axis),
            "%nclusterid" => Self::Clusters(axis),
            "%cluster_ctaid" => Self::ClusterCtaid(axis),
            "%cluster_nctaid" => Self::ClusterNctaid(axis),
            "%cluster_ctarank" => Self::ClusterRank,
            "%cluster_nctarank" => Self::ClusterSize,
            "%is_explicit_cluster" => Self::IsCluster,
            "%dynamic_smem_size" => Self::DynamicShared,
            "%nsmid" => Self::NumSms,
            "%smid" | "%gridid" | "%clock" | "%clock_hi" | "%clock64" => Self::Zero,
            _ => return None,
        })
    }
}
