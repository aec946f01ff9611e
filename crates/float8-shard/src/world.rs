//! [`World`]: the ranks of a sharded model for one backend.
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use burn_backend::tensor::{Device, FloatTensor};
use burn_float8::backend::Float8Backend;

use crate::all_reduce::all_reduce;
use crate::backend::ShardBackend;
use crate::collectives::DeviceCollectives;
use crate::comm::{Communicator, Operation};
use crate::config::{Mesh, ShardConfig};
use crate::error::ShardError;
use crate::overlap::Reduces;

type CroppedFn<B> = fn(&<B as Float8Backend>::Operand, usize, &Device<B>) -> <B as Float8Backend>::Operand;
type CollectivesFn<B> = fn(&Device<B>, &Communicator) -> Option<Box<dyn DeviceCollectives<B>>>;

/// Communicator, and the backend's collectives on device memory.
#[derive(Clone)]
pub(crate) struct Group<B: Float8Backend> {
    pub(crate) comm: Communicator,
    collectives: CollectivesFn<B>,
}

/// Mesh of the ranks.
pub(crate) struct World<B: Float8Backend> {
    /// All ranks.
    pub(crate) all: Group<B>,
    /// Ranks that divide one copy of the model's parts on this rank.
    pub(crate) shard: Group<B>,
    /// Ranks with the same rows, one of each copy.
    pub(crate) replicate: Group<B>,
    /// Ranks of this rank's copy, with all parts of its linears.
    pub(crate) copy: Group<B>,
    /// Ranks with the same parts of linears and other batches.
    pub(crate) data: Group<B>,
    /// See [`Sharded::set_requires_gradient_sync`](crate::Sharded::set_requires_gradient_sync).
    pub(crate) requires_gradient_sync: Arc<AtomicBool>,
    pub(crate) reduces: Reduces<B>,
    /// See [`ShardBackend::cropped`].
    pub(crate) cropped: CroppedFn<B>,
}

impl<B: ShardBackend> World<B> {
    pub(crate) fn new(comm: &Communicator, config: ShardConfig) -> Result<Self, ShardError> {
        let Mesh { replicate: replicas, shard: shards, tensor } = config.mesh(comm.world_size())?;
        let (rank, of_copy) = (comm.rank(), shards * tensor);
        let shard = comm.group(shards, rank / of_copy * tensor + rank % tensor)?;
        let replicate = comm.group(replicas, rank % of_copy)?;
        let copy = if tensor == 1 { shard.clone() } else { comm.group(of_copy, rank / of_copy)? };
        let data = match [replicas, shards] {
            [1, _] => shard.clone(),
            [_, 1] => replicate.clone(),
            _ => comm.group(replicas * shards, rank % tensor)?,
        };
        let [all, shard, replicate, copy, data] =
            [comm.clone(), shard, replicate, copy, data].map(|comm| Group { comm, collectives: B::collectives });
        let (requires_gradient_sync, reduces) = (Arc::new(true.into()), Reduces::default());
        Ok(Self { all, shard, replicate, copy, data, requires_gradient_sync, reduces, cropped: B::cropped })
    }
}

impl<B: Float8Backend> Group<B> {
    /// Number of its ranks.
    pub(crate) fn size(&self) -> usize {
        self.comm.world_size()
    }

    /// Collectives on the memory of a device.
    pub(crate) fn on_device(&self, device: &Device<B>) -> Option<Box<dyn DeviceCollectives<B>>> {
        (self.collectives)(device, &self.comm)
    }

    /// Device collectives of a model on these devices; None unless it is on one device.
    pub(crate) fn of_model(&self, devices: &[Device<B>]) -> Option<Box<dyn DeviceCollectives<B>>> {
        match devices {
            [device] => self.on_device(device),
            _ => None,
        }
    }

    /// Maximum over its ranks of amaxes `[n]`, on device memory where supported; NaN wins.
    pub(crate) fn max(&self, label: &str, amaxes: FloatTensor<B>) -> Result<FloatTensor<B>, ShardError> {
        let collectives = self.on_device(&B::float_device(&amaxes));
        Ok(all_reduce(&self.comm, collectives.as_deref(), label, Operation::AllReduceMaxBits, vec![amaxes])?.remove(0))
    }
}
