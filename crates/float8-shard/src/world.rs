//! [`World`]: the ranks of a sharded model as one backend reaches them.
use burn_backend::TensorData;
use burn_backend::tensor::{Device, FloatTensor};
use burn_float8::backend::Float8Backend;
use burn_float8::seam::read_f32;
use float8_comm::{CommError, Communicator};

use crate::backend::ShardBackend;
use crate::collectives::DeviceCollectives;

type CollectivesFn<B> = fn(&Device<B>, &Communicator) -> Option<Box<dyn DeviceCollectives<B>>>;

/// The ranks, and their collectives on a device's memory where it has some.
pub(crate) struct World<B: Float8Backend> {
    pub(crate) comm: Communicator,
    collectives: CollectivesFn<B>,
}

impl<B: ShardBackend> World<B> {
    pub(crate) fn new(comm: &Communicator) -> Self {
        Self { comm: comm.clone(), collectives: B::collectives }
    }
}

impl<B: Float8Backend> World<B> {
    /// The collectives on the memory of a device.
    pub(crate) fn on_device(&self, device: &Device<B>) -> Option<Box<dyn DeviceCollectives<B>>> {
        (self.collectives)(device, &self.comm)
    }

    /// The collectives of a model on these devices: of one that lies on one device.
    pub(crate) fn of_model(&self, devices: &[Device<B>]) -> Option<Box<dyn DeviceCollectives<B>>> {
        match devices {
            [device] => self.on_device(device),
            _ => None,
        }
    }

    /// The largest of every rank's amaxes `[n]`, on the device's memory where it can; NaN wins.
    pub(crate) fn max(&self, label: &str, amaxes: FloatTensor<B>) -> Result<FloatTensor<B>, CommError> {
        let device = B::float_device(&amaxes);
        if let Some(collectives) = self.on_device(&device) {
            return collectives.all_reduce_max(label, amaxes);
        }
        let bits = read_f32::<B>(amaxes).into_iter().map(f32::to_bits).collect();
        let all = self.comm.all_reduce_max_bits(label, bits)?.wait()?;
        let all: Vec<f32> = all.into_iter().map(f32::from_bits).collect();
        Ok(B::float_from_data(TensorData::from(&all[..]), &device))
    }
}
