//! [`parameters`]: a model's parameters in the layout of files. Each is read from its device on
//! request.

use std::rc::Rc;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use super::names;
use crate::error::device_failed;
use crate::{JobError, ModulePath};

/// Parameter that is read on request.
pub(super) struct Parameter {
    /// Path in the module tree.
    pub(super) path: String,
    /// Shape in files; for a linear `[out, in]`.
    pub(super) shape: Vec<usize>,
    /// Reads its values in f32, row-major.
    pub(super) read: Read,
}

/// Reads a parameter from its device.
pub(super) type Read = Rc<dyn Fn() -> Result<Vec<f32>, JobError>>;

/// Parameters of `model` in the order of the module tree.
pub(super) fn parameters<B: Backend, M: Module<B>>(model: &M) -> Vec<Parameter> {
    let mut collect = Collect { path: ModulePath::default(), parameters: Vec::new() };
    model.visit(&mut collect);
    collect.parameters
}

struct Collect {
    path: ModulePath,
    parameters: Vec<Parameter>,
}

impl<B: Backend> ModuleVisitor<B> for Collect {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let path = self.path.dotted();
        let tensor = param.val();
        let tensor = if names::is_linear(&path) { tensor.transpose() } else { tensor };
        let shape = tensor.dims().to_vec();
        self.parameters.push(Parameter { path, shape, read: Rc::new(move || read(&tensor, "reading the weights")) });
    }
}

/// Values of a tensor in f32, row-major. `doing` names the task in errors.
pub(super) fn read<B: Backend, const D: usize>(
    tensor: &Tensor<B, D>,
    doing: &'static str,
) -> Result<Vec<f32>, JobError> {
    let data = tensor.clone().try_into_data().map_err(|error| device_failed(doing, &error))?.convert::<f32>();
    data.into_vec().map_err(|error| device_failed(doing, format!("{error:?}")))
}
