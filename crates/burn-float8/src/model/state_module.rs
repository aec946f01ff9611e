//! [`Float8StateModule`]: state of a model's converted linears as a module, to save and load it
//! with the model.
use core::marker::PhantomData;
use std::sync::Arc;

use burn::module::{
    AutodiffModule, Content, Devices, HasAutodiffModule, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper,
    ModuleVisitor,
};
use burn::tensor::backend::{AutodiffBackend, Backend};

use super::state::{Converted, Float8State, States};
use crate::error::Float8Error;
use crate::stack::Float8Stack;

/// A module whose record is a model's [`Float8State`]. If it is next to the model in a common
/// module, checkpoints of burn-train, `save_file` and `load_file` resume with the same losses.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::backend::{Autodiff, Flex};
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::prelude::*;
/// use burn_float8::{Float8, Float8Config, Float8StateModule, Recipe};
///
/// #[derive(Module, Debug)]
/// struct Trained<B: Backend> {
///     model: Linear<B>,
///     float8: Float8StateModule<B>, // after the model: what it restores belongs to the model's parameters
/// }
///
/// type B = Float8<Autodiff<Flex>>;
/// let model = LinearConfig::new(8, 8).init::<B>(&Default::default());
/// let model = Float8Config::new(Recipe::Delayed).apply(model).unwrap().0;
/// let trained = Trained { float8: Float8StateModule::new(&model).unwrap(), model };
/// let record = trained.clone().into_record();
/// let resumed = trained.load_record(record);
/// # }
/// ```
///
/// # Panics
///
/// `load_record` panics with the [`Float8Error`] if the state belongs to another model or
/// configuration, since Burn's `load_record` returns no error. [`Float8State::restore`] returns it.
#[derive(Clone)]
pub struct Float8StateModule<B: Backend> {
    states: Arc<dyn States>,
    backend: PhantomData<fn() -> B>,
}

impl<B: Float8Stack> Float8StateModule<B> {
    /// State of a model with an applied configuration. Create a new one after applying another
    /// configuration.
    ///
    /// # Errors
    ///
    /// [`Float8Error::NotApplied`] if the model has no converted linears.
    pub fn new<M: Module<B>>(model: &M) -> Result<Self, Float8Error> {
        let states = Converted::<B>::of(model);
        if states.is_empty() {
            return Err(Float8Error::NotApplied);
        }
        Ok(Self { states: Arc::new(states), backend: PhantomData })
    }
}

impl<B: Backend> Float8StateModule<B> {
    fn on<C: Backend>(&self) -> Float8StateModule<C> {
        Float8StateModule { states: self.states.clone(), backend: PhantomData }
    }
}

impl<B: Backend> core::fmt::Debug for Float8StateModule<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Float8StateModule")
    }
}

impl<B: Backend> Module<B> for Float8StateModule<B> {
    type Record = Float8State;

    fn collect_devices(&self, devices: Devices<B>) -> Devices<B> {
        devices
    }

    fn fork(self, _: &B::Device) -> Self {
        self
    }

    fn to_device(self, _: &B::Device) -> Self {
        self
    }

    fn visit<Visitor: ModuleVisitor<B>>(&self, _: &mut Visitor) {}

    fn map<Mapper: ModuleMapper<B>>(self, _: &mut Mapper) -> Self {
        self
    }

    fn load_record(self, record: Float8State) -> Self {
        if let Err(error) = self.states.restore(&record) {
            panic!("{error}");
        }
        self
    }

    fn into_record(self) -> Float8State {
        self.states.export()
    }
}

impl<B: AutodiffBackend> AutodiffModule<B> for Float8StateModule<B> {
    type InnerModule = Float8StateModule<B::InnerBackend>;

    fn valid(&self) -> Self::InnerModule {
        self.on()
    }

    fn from_inner(module: Self::InnerModule) -> Self {
        module.on()
    }
}

impl<B: AutodiffBackend> HasAutodiffModule<B> for Float8StateModule<B::InnerBackend> {
    type TrainModule = Float8StateModule<B>;
}

impl<B: Backend> ModuleDisplayDefault for Float8StateModule<B> {
    fn content(&self, content: Content) -> Option<Content> {
        Some(content)
    }
}

impl<B: Backend> ModuleDisplay for Float8StateModule<B> {}
