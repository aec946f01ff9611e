//! [`World`]: the ranks of a sharded model as one backend reaches them.
use burn::module::Module;
use burn_backend::tensor::Device;
use burn_float8::Float8Stack;
use burn_float8::backend::Float8Backend;
use float8_comm::Communicator;

use crate::backend::ShardBackend;
use crate::collectives::DeviceCollectives;

type CollectivesFn<B> = fn(&Device<B>, &Communicator) -> Option<Box<dyn DeviceCollectives<B>>>;

/// The ranks, and their collectives on a device's memory where it has some.
pub(crate) struct World<B: Float8Backend> {
    pub(crate) comm: Communicator,
    collectives: CollectivesFn<B>,
}

impl<B: Float8Backend> Clone for World<B> {
    fn clone(&self) -> Self {
        Self { comm: self.comm.clone(), collectives: self.collectives }
    }
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

    /// The collectives of a model that lies on one device.
    pub(crate) fn of_model<S, M>(&self, model: &M) -> Option<Box<dyn DeviceCollectives<B>>>
    where
        S: Float8Stack<Inner = B>,
        M: Module<S>,
        B: Float8Backend<Device = S::Device>,
    {
        match &Module::<S>::devices(model)[..] {
            [device] => self.on_device(device),
            _ => None,
        }
    }
}
