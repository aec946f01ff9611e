//! [`ModulePath`]: where a visitor or mapper is in a module tree.

/// The names met on the way down a module tree, for visitors and mappers.
#[derive(Debug, Default)]
pub struct ModulePath(Vec<String>);

impl ModulePath {
    /// A module, on the way down.
    pub fn enter(&mut self, name: &str) {
        self.0.push(name.to_string());
    }

    /// The way back up.
    pub fn exit(&mut self) {
        self.0.pop();
    }

    /// The names with dots between them: `layers.0.mlp.up_proj.weight`.
    pub fn dotted(&self) -> String {
        self.0.join(".")
    }
}

/// The type of the module that Burn calls so: `Linear` of `Struct:Linear`.
pub(crate) fn module_type(container_type: &str) -> &str {
    container_type.rsplit(':').next().unwrap_or(container_type)
}
