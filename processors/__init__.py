"""The application. A file or folder without underscore is one Deployment, under the same name everywhere."""
